"""The averaging worker: a child process with asyncio, hivemind and p2pd."""
