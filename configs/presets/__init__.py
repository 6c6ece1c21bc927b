"""Ready-made configurations, as YAML files: `samovar serve --config local-cpu`."""
