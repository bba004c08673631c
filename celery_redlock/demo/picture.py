from __future__ import annotations


def draw(story, path):
    pass
