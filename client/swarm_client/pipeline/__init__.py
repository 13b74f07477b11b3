"""The step protocol in the volunteer: trainer, stage server, hedged requests, step close."""
