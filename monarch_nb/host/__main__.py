"""`python -m monarch_nb.host`: run a host agent."""

import sys

from monarch_nb.host.agent import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
