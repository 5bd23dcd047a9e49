"""Networks that people run densely over volumes, from packages and from their descriptions, and how they are read."""
