"""What the documentation site has beside the pages of docs/: made from the code, the README and the notebooks."""
