"""Plans of finished searches in the database: what they hold for, how they are stored, and how a call starts from one."""
