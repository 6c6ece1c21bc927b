"""Prometheus and Grafana for Samovar: panels, alerts and scrape config, made from the metrics themselves."""
