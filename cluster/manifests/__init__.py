"""Files by which others start Samovar: systemd's unit, a RayService, a Helm chart, the image's Dockerfile."""
