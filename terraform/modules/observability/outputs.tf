output "log_group" {
  description = "The log group that nodes write to: {name, arn}."
  value       = { name = aws_cloudwatch_log_group.this.name, arn = aws_cloudwatch_log_group.this.arn }
}
