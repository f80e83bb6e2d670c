"""Tables, pictures and live views from the events of a run, and the audit of its receipts."""
