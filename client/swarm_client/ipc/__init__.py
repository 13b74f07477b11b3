"""Communication with child processes: framed messages, requests and answers, shared memory."""
