"""SQL Server 2017 and later, and Azure SQL."""
