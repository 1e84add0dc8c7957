"""Offline teachers: scripted solvers of the micro tasks behind a local OpenAI-compatible server.

They are scripted, no models: they look a task up in the grammar and write its body with a given probability.
They exist so that the whole path to a teacher (HTTP, retries, prices, agreement, pairs) runs on any machine.
"""
