"""`python -m millstream.cli`: starts parts of a home, whatever PATH contains."""

from millstream.cli.main import main

if __name__ == "__main__":
    main()
