"""What makes work credible: chains of transcripts, audits, and the standing of owners. Values and
pure decisions; the rules carry them out (docs/decisions, number 0036)."""
