"""The Lightning side: when to measure, on what, and where the numbers go. No mathematics."""
