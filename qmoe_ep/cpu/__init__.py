"""The CPU provider."""
