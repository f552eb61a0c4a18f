"""The Trainer and what it needs: metrics, sinks, evaluation, spike policy, distillation, dry run."""
