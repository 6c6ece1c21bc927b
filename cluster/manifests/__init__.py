"""Files for others that start Samovar: systemd's unit, Kubernetes' RayService, the image's Dockerfile."""
