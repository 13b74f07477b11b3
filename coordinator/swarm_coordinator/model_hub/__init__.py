"""Models on the Hugging Face hub: download, upload, and the card that an exported model carries."""
