"""`samovar doctor`: what is wrong with a machine before a service runs; and how a diagnosis is shown."""
