from support.app_fixtures import model_folder, prints, recipe, refused, server

__all__ = ["model_folder", "prints", "recipe", "refused", "server"]
