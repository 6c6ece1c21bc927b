output "bucket" {
  description = "The bucket of KV blocks: {name, arn}."
  value       = { name = aws_s3_bucket.kv.id, arn = aws_s3_bucket.kv.arn }
}

output "kms_key_arn" {
  description = "The key of everything at rest in this cluster but node disks, which have the account's EBS key."
  value       = aws_kms_key.this.arn
}
