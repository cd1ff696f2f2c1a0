"""What is stopped and what it answers, drawn together over the ranks: as text and as plain data. Pure."""
