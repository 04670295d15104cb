"""Words with a tag each: their DataModule.

Settings, tables and most of a build are those of `texts`.
"""
