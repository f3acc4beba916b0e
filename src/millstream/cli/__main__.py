"""`python -m millstream.cli`: how parts of a home are started, whatever the PATH says."""

from millstream.cli.main import main

if __name__ == "__main__":
    main()
