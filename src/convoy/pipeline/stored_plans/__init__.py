"""Plans of finished searches in the database: their keys, how they are stored, and how a call starts from one."""
