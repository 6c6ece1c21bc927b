terraform {
  required_version = ">= 1.11"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 6.66"
    }
  }

  # Filled in by envs/*.s3.tfbackend: terraform init -backend-config=envs/dev.s3.tfbackend
  backend "s3" {}
}

provider "aws" {
  region = var.region

  default_tags {
    tags = merge(var.tags, { samovar-cluster = var.cluster_name })
  }
}
