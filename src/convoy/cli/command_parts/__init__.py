"""Parts of commands that are too long for one file: training runs, study sessions, nets and data of single commands."""
