output "state_bucket" {
  description = "Put it into envs/*.s3.tfbackend as `bucket`."
  value       = aws_s3_bucket.state.id
}
