"""A checkout, a home and a throwaway system for the installers."""
