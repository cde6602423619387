"""DeepSpeed's configuration and engine, over shardd."""
