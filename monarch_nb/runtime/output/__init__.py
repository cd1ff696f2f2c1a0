"""What actors write and display, on its way out of their process."""
