"""Alerts: what the operator learns of denials (E4).

A process of its own follows the audit log (`follow`), says which rows are denials (`event`), what of them is new
(`dedupe`), keeps what must be told in a spool that survives it (`state`), and tells the sinks (`sinks`). Nothing else
in the program raises an alert: whoever denies writes a row, and the row comes before the answer.

Import the module you need; this file imports nothing.
"""
