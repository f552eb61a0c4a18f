"""Help shows defaults and nothing else; usage shows how the command was called."""

from megabert.common.arguments import Parser


def test_help_shows_each_default_once():
    parser = Parser(prog="x", description="First line.\n\n    kept as it is\n")
    parser.add_argument("--lr", type=float, default=5e-5, help="100% of it")
    parser.add_argument("--seq-len", nargs="+", type=int, default=[128, 512], help="tokens")
    parser.add_argument("--tokenizer", default="", help="a file")
    parser.add_argument("--quiet", action="store_true", help="no bar")
    parser.add_argument("rest", nargs="*", default=["a"], help="more")
    shown = " ".join(parser.format_help().split())
    assert "100% of it (default: 5e-05)" in shown and "tokens (default: 128 512)" in shown
    assert shown.count("default") == 2 and "    kept as it is\n" in parser.format_help()
