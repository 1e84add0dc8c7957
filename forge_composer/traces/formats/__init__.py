"""Traces of other producers: import into one neutral record, export from it.

`files.ConversationReader` reads files and folders of any format here and reports bad lines; `conversation`
has the record; `chat`, `verifiers`, `swe_agent` and `atif` (with `atif_export`) read and write one document
each. docs/traces.md lists what each format keeps.
"""
