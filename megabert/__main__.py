"""`python -m megabert NAME …`, the same as `megabert NAME …`."""

import sys

from megabert.cli import main

if __name__ == "__main__":
    sys.exit(main())
