"""Files for others that start Samovar: systemd's unit, a RayService and a Helm chart, the image's Dockerfile."""
