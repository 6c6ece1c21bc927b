output "target_group_arn" {
  description = "Target group that nodes register with."
  value       = aws_lb_target_group.this.arn
}

output "endpoint_url" {
  description = "What clients use as the server's address, without /v1."
  value       = "${local.has_tls ? "https" : "http"}://${local.host}"
}

output "metrics" {
  description = "Names of the load balancer and its target group in CloudWatch."
  value = {
    load_balancer = aws_lb.this.arn_suffix
    target_group  = aws_lb_target_group.this.arn_suffix
  }
}
