"""Models as data: one decoder, a spec for each architecture, a loader."""
