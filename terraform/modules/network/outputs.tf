output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "private_subnets" {
  description = "Private subnets by zone: {zone = {id, arn}}."
  value       = { for zone, subnet in aws_subnet.private : zone => { id = subnet.id, arn = subnet.arn } }
}

output "node_security_group" {
  description = "Security group of the nodes: {id, arn}."
  value       = { id = aws_security_group.nodes.id, arn = aws_security_group.nodes.arn }
}

output "s3_endpoint_id" {
  description = "The S3 gateway endpoint, for bucket policies."
  value       = aws_vpc_endpoint.s3.id
}
