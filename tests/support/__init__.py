"""Helpers that several tests share; nothing here tests anything by itself."""
