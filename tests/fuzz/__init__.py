"""Decoders of what strangers send, and how they are tried with bytes that nobody would write.

`targets` has them all. `test_fuzz_targets` tries each for a moment in every run of the tests;
`make fuzz` runs them under atheris, which looks for new paths through the code, for longer.
"""
