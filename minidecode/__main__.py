"""`python -m minidecode`, the same as the installed `minidecode`."""

import sys

from minidecode.cli import main

if __name__ == "__main__":
    sys.exit(main())
