"""Output and displays of actors, on their way out of the process."""
