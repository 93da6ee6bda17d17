"""Bounds over balls of inputs."""
