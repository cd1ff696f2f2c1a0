"""The composition root: what the rows below offer is put together here."""
