"""The pages of the documentation site beside those of docs/, generated from the code, the README and the notebooks."""
