"""A plan awake: arena, session, pipeline."""
