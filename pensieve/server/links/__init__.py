"""``EngineLink``s: to an engine in a process of its own, and to one in a thread for tests."""
