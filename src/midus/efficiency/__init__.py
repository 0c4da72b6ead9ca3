"""What things cost: times and memory, measured where the command runs."""
