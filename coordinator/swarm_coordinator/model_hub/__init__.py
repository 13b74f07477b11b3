"""The Hugging Face hub: models and data sets, and the card that an exported model carries."""
