"""What each command of ``highwater`` does, and what it prints and draws."""
