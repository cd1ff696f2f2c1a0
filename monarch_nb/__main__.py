"""`python -m monarch_nb` is `monarch-nb`."""

import sys

from monarch_nb.cli import main

if __name__ == "__main__":
    sys.exit(main())
